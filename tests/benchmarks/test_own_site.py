"""A site of its own has what a distribution requires, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

from own_site import link_requirements


def _install(site: Path, name: str, *requires: str, module: str) -> None:
    info = f"{name.replace('-', '_')}-1.dist-info"
    metadata = site / info
    metadata.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        "Version: 1",
        *(f"Requires-Dist: {line}" for line in requires),
    ]
    (metadata / "METADATA").write_text("\n".join([*lines, "Provides-Extra: fast", ""]), encoding="utf-8")
    file = site / module
    file.parent.mkdir(exist_ok=True)
    file.touch()
    files = [module, f"{info}/METADATA", f"../bin/{name}"]
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files), encoding="utf-8")


def test_what_is_required_is_linked(tmp_path: Path, monkeypatch) -> None:
    site, own = tmp_path / "site", tmp_path / "own"
    site.mkdir()
    own.mkdir()
    _install(
        site,
        "zz-app",
        "zz-lib[fast]>=1",
        'zz-test; extra == "dev"',
        "zz-missing",
        module="zz_app/__init__.py",
    )
    _install(site, "zz-lib", "zz-app", 'zz-speed; extra == "fast"', module="zz_shared/lib.py")
    _install(site, "zz-speed", module="zz_speed.py")
    _install(site, "zz-test", module="zz_test.py")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert link_requirements("zz-app", ["json"], own) == ["zz-app", "zz-lib", "zz-speed"]
    names = {path.name for path in own.iterdir()}
    assert {"zz_app", "json", "zz_shared", "zz_speed.py", "zz_lib-1.dist-info"} <= names
    assert not {"zz_test.py", "zz_test-1.dist-info", "bin", ".."} & names
    assert (own / "zz_app" / "__init__.py").samefile(site / "zz_app" / "__init__.py")
