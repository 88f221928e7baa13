"""Which steps to save (``when``) and which to keep (``keep``): pure functions over plain facts."""
