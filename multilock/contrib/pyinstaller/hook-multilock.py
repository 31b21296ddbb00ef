"""PyInstaller runs this file for a program that imports multilock. This file adds the backends whose client library is
installed.

To leave a backend out of a program, build it with ``--exclude-module multilock_etcd``, for example.
"""

from importlib.util import find_spec

from PyInstaller.utils.hooks import collect_data_files

from multilock.registry import OURS

__all__: list[str] = []

hiddenimports = sorted({ours.module for ours in OURS.values() if not ours.library or find_spec(ours.library)})
datas = [file for module in ["multilock", *hiddenimports] for file in collect_data_files(module)]
