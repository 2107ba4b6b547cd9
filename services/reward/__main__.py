"""`python -m services.reward`: the reward service.

--spec FILE                   as a process of a run, started by the launcher
serve --config FILE           standalone, for any number of runs
status ADDRESS_OR_RUN ...     show the health of services
keys FOLDER                   create keys for a service that is used over a network
"""

import sys

from areal_like import quick_exit
from areal_like.process import run_process
from services.reward import standalone
from services.reward.server import serve

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in (*standalone.COMMANDS, "-h", "--help"):
        sys.exit(standalone.main(sys.argv[1:]))
    quick_exit.run(lambda: run_process(serve))
