"""The built wheel in environments of its own: `nox`, or `nox -s "wheel(oldest)"`.

Each session downloads torch: several gigabytes of CUDA libraries, where pip finds no CPU build of that version. An
index in `PIP_EXTRA_INDEX_URL` may have one.
"""

from __future__ import annotations

from pathlib import Path

import nox

VERSIONS = {
    # the floors of pyproject.toml; numpy 2 and setuptools 81 are younger than that tensorboard
    "oldest": ("torch==2.6.0", "lightning==2.4.0", "tensorboard==2.16.2", "numpy<2", "setuptools<81"),
    "development": ("-c", "constraints.txt"),
    "newest": (),
}

nox.options.error_on_missing_interpreters = True


@nox.session
@nox.parametrize("versions", list(VERSIONS), ids=list(VERSIONS))
def wheel(session: nox.Session, versions: str) -> None:
    """Build it, install it with `versions`, and do with it what the README says, outside of the checkout."""
    dist, runs = Path(session.create_tmp()) / "dist", Path(session.create_tmp()) / "runs"
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(dist), silent=True)
    built = max(dist.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    session.install(str(built), "scikit-learn", *VERSIONS[versions])
    session.chdir(session.create_tmp())
    session.run("python", "-m", "pip", "check")
    session.run("python", "-c", "import torch, lightning as L; print(torch.__version__, L.__version__)")
    session.run("gradwatch", "--version")
    session.run("gradwatch", "demo", "--out", str(runs))
    session.run("gradwatch", "demo", "--case", "nan", "--out", str(runs))
    listed = str(session.run("gradwatch", "ls", str(runs), silent=True))
    assert "vanishing" in listed, listed  # what fails inside a watch does not end a training
    assert "nonfinite" in listed, listed
    session.run("gradwatch", "report", str(runs / "unhealthy" / "version_0"), "-o", "report.html")
    session.run("gradwatch", "compare", *(str(runs / name / "version_0") for name in ("healthy", "unhealthy")))
    session.run("python", "-c", TAB)


TAB = """
from tensorboard import default
import gradwatch.tensorboard_plugin.plugin
assert 'gradwatch' in {plugin.__module__.split('.')[0] for plugin in default.get_dynamic_plugins()}
"""
"""Whether TensorBoard has the tab."""
