"""Background saves and loads, worker threads, and waiting for them at interpreter exit."""
