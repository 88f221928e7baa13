"""``python -m ckpt_core.cli``: the command line where its script is not installed."""

from ckpt_core.cli import main

if __name__ == "__main__":
    main()
