"""`python tests/support/reachable.py URL`: exit status 0 if the URL answers within seconds.

For the Makefile: pip itself tries an index that does not answer again and again, for every package.
"""

import sys
import urllib.request


def reachable(url: str, secs: float = 5.0) -> bool:
    """Whether the URL answers."""
    try:
        with urllib.request.urlopen(url, timeout=secs) as answer:
            return answer.status == 200
    except (OSError, ValueError):  # URLError is an OSError
        return False


if __name__ == "__main__":
    sys.exit(not reachable(sys.argv[1]))
