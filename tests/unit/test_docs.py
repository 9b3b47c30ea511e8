"""What the documentation shows is run."""

import re
import subprocess
import sys

import pytest
from conftest import COLLECTION

ENGLISH = sorted(path.name for path in (COLLECTION / "docs/en").iterdir())


def shape(text):
    """What has to be equal in every language: headings by level, code, first cells of tables, lists, names."""
    code = re.compile(r"```.*?```|(?:^    [^\n]*\n)+", re.M | re.S)
    prose = code.sub("", text)
    return {
        "code": code.findall(text),
        "headings": re.findall(r"^#+(?= )", prose, re.M),
        "rows": [re.findall(r"`[^`]+`", row.split("|")[1]) for row in re.findall(r"^\|.*\|$", prose, re.M)],
        "items": re.findall(r"^(?:[0-9]+\.|[-*])(?= )", prose, re.M),
        "names": sorted(set(re.findall(r"`[^`\n]+`", prose))),
    }


@pytest.mark.parametrize("language", ["ru", "zh"])
def test_the_languages_are_in_step(language):
    assert sorted(path.name for path in (COLLECTION / "docs" / language).iterdir()) == ENGLISH
    for name in ENGLISH:
        translated, english = (shape((COLLECTION / f"docs/{x}/{name}").read_text()) for x in (language, "en"))
        for what, value in english.items():
            assert translated[what] == value, f"docs/{language}/{name}: {what}"


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
