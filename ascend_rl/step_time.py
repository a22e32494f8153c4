import sys

from ascend_rl.__main__ import run

if __name__ == "__main__":
    sys.exit(run("step-time"))
