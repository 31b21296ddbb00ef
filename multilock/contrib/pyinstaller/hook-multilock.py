"""PyInstaller runs this file for a program that imports multilock. It adds the backends whose client library is
installed.

A program that needs only some of them leaves the others out with ``--exclude-module multilock_etcd``.
"""

from importlib.util import find_spec

from PyInstaller.utils.hooks import collect_data_files

from multilock.registry import OURS

__all__: list[str] = []

hiddenimports = sorted({ours.module for ours in OURS.values() if not ours.library or find_spec(ours.library)})
datas = [file for module in ["multilock", *hiddenimports] for file in collect_data_files(module)]
