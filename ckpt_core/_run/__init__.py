"""One training run: a directory of steps, who may write to it, what is kept, and the way back."""
