"""Pure functions of shapes: regions, chunks and blocks of arrays, and which process writes them."""
