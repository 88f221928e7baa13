"""Which steps to save (``when``) and which to keep (``keep``): pure functions, without I/O."""
