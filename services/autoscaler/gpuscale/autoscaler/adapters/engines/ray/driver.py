"""The process that speaks to Ray for the adapter: a question a line on its input, an answer a line on its output.

Started with the cluster's address, the namespace and the adapter's id. It ends with its input. Whatever Ray prints goes to
its error output.
"""

import logging
import os
import sys
from typing import BinaryIO

import ray
from ray.exceptions import RayError

from gpuscale.autoscaler.adapters.engines.ray.cluster import Cluster
from gpuscale.autoscaler.adapters.engines.ray.messages import ANSWER, QUESTION, Answer


def main(argv: list[str]) -> int:
    """Answer until the input ends; returns the exit code."""
    address, namespace, adapter = argv
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)  # no library may write among the answers
        try:
            ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            _put(answers, Answer(error=f"cannot connect to Ray at {address}: {error}"))
            return 1
        return _serve(Cluster(namespace, adapter), answers)


def _serve(cluster: Cluster, answers: BinaryIO) -> int:
    for line in sys.stdin.buffer:
        orders = QUESTION.validate_json(line).orders
        try:
            answer = Answer(failed=cluster.take(orders)) if orders else Answer(cluster.observe())
            _put(answers, answer)
        except (RayError, ConnectionError, TimeoutError) as error:
            _put(answers, Answer(error=f"Ray failed: {error}"))
    return 0


def _put(answers: BinaryIO, answer: Answer) -> None:
    answers.write(ANSWER.dump_json(answer) + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
