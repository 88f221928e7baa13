"""Device arrays: transfers to and from host memory and shardings."""
