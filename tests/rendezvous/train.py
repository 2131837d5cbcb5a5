"""A training script as anybody would write it for torchrun, without a line of ours: it steps with gloo.

Every step is one all-reduce and one JSON line: when, who, in which attempt, and in how large a world. It ends
when somebody sees the file `finish`, in the same step everywhere.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Whatever becomes of the test and of torchrun, no worker outlives this.
LIFE_S = 600
STEP_S = 0.02


def main() -> None:
    signal.alarm(LIFE_S)
    folder, task = Path(sys.argv[1]), sys.argv[2]
    if task == "fail":
        raise RuntimeError("this script always fails")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    facts = {
        "node_id": os.environ["TEST_NODE_ID"],
        "node_rank": int(os.environ["GROUP_RANK"]),
        "rank": dist.get_rank(),
        "pid": os.getpid(),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    }
    with (folder / "steps.jsonl").open("a", buffering=1) as steps:
        is_finished = False
        while not is_finished:
            counts = torch.tensor([1, int((folder / "finish").exists())])
            dist.all_reduce(counts)
            is_finished = bool(counts[1])
            line = {"at_s": time.monotonic(), **facts, "world_size": int(counts[0])}
            steps.write(json.dumps(line) + "\n")
            time.sleep(STEP_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
