"""`python -m tinyllm` is the command `tinyllm`."""

import sys

from tinyllm.commands.cli import main

sys.exit(main())
