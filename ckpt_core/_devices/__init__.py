"""Arrays on devices: to host memory and back, and where they lie."""
