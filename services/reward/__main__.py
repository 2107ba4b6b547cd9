"""`python -m services.reward --spec FILE`: the reward service as a process of a run."""

from areal_like.process import run_process
from services.reward.server import serve

if __name__ == "__main__":
    run_process(serve)
