"""Which region of an array lies in which chunk and block, and who writes it: pure functions over shapes."""
