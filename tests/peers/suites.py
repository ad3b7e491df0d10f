"""All cases of all suites; `python -m tests.peers.suites` writes the table of docs/peers.md."""

from pathlib import Path

from tests.peers import inductor, onnxscript, torch_fx, vllm
from tests.peers.cases import of, table, update

CASES = list(of(*torch_fx.CASES, inductor.INDUCTOR, onnxscript.ONNX, *vllm.SUITES))
PAGE = Path(__file__).parents[2] / "docs/peers.md"

if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text(), table(CASES)))
