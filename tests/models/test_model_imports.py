"""What building a model imports."""

import subprocess
import sys

CHECK = """
import sys
import pageloom.models.build
loaded = [m for m in sys.modules if m.startswith("transformers.models.") and "modeling" in m]
loaded += [m for m in sys.modules if m in ("transformers.modeling_utils", "torch._dynamo")]
sys.exit(", ".join(loaded) or 0)
"""


def test_the_decoder_does_not_import_the_model_code_of_transformers():
    """It takes seconds, which the start of an engine does not have."""
    result = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
