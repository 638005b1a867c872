"""`python -m ft_core.control`: the controller's process."""

import sys

from ft_core.control.shell import main

sys.exit(main())
