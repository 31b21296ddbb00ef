"""Tests of the hook for PyInstaller, which need no PyInstaller."""

from __future__ import annotations

import runpy
import sys
from types import ModuleType

import pytest

from multilock.contrib.pyinstaller import hook_dirs
from multilock.registry import OURS


def test_the_hook_adds_every_backend_with_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = ModuleType("PyInstaller.utils.hooks")
    monkeypatch.setattr(hooks, "collect_data_files", lambda module: [(f"{module}/file", module)], raising=False)
    for name in ("PyInstaller", "PyInstaller.utils", "PyInstaller.utils.hooks"):
        monkeypatch.setitem(sys.modules, name, hooks)
    [folder] = hook_dirs()
    found = runpy.run_path(f"{folder}/hook-multilock.py")
    backends = sorted({ours.module for ours in OURS.values()})
    assert found["hiddenimports"] == backends
    assert [module for _, module in found["datas"]] == ["multilock", *backends]
