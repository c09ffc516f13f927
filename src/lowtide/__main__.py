"""`python -m lowtide`: the command line."""

from __future__ import annotations

import sys

from lowtide.cli import main

sys.exit(main())
