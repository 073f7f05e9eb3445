"""`python -m rlhf.preflight`: see launch.py."""

import sys

from rlhf.preflight.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
