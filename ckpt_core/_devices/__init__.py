"""Device arrays: transfers to and from host memory, shardings, and device collectives."""
