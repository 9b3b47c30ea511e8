"""What the documentation shows is run."""

import re
import subprocess
import sys

from conftest import COLLECTION


def test_the_script_of_the_identity_page_reproduces_the_vectors(tmp_path):
    page = (COLLECTION / "docs/en/identity.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    imports = set(re.findall(r"^import (.*)$", code, re.M)[0].split(", "))
    assert imports <= sys.stdlib_module_names
    (tmp_path / "vectors.py").write_text(code)
    command = [sys.executable, "-I", str(tmp_path / "vectors.py"), str(COLLECTION / "docs/identity-vectors.json")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "all vectors reproduced\n"
