"""What two processes have seen of their replicas."""

import json
from pathlib import Path

from tests.ranks.support import shared
from tests.support import run_ranks


def replicas(tmp_path_factory):
    """What each of two ranks has observed, by case; for all tests of a session."""

    def make(folder):
        folder.mkdir()
        files = run_ranks(Path(__file__).with_name("replica_worker.py"), folder)
        return [json.loads(file.read_text()) for file in files]

    results = shared(tmp_path_factory, "replicas", make)
    assert not [result["error"] for result in results if "error" in result]
    return results
