"""``python -m hogwild_agents`` is ``hogwild``."""

import sys

from hogwild_agents.cli.commands import main

sys.exit(main())
