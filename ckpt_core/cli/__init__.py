"""The command line; being built."""


def main() -> None:
    """Nothing yet."""
