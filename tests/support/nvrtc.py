"""NVRTC in tests: a stand-in of any release, and what was written into an image.

May import pdscope.compiler.nvrtc and support.cc.
"""

from pathlib import Path

import pytest
from support import cc

from pdscope.compiler.nvrtc import Nvrtc, find_nvrtc
from pdscope.errors import TargetError


def fake_nvrtc(release: str, ptx: str, sm_90: str = "(void)0") -> Path:
    """A library that says it is of this release and writes PTX of this version. `sm_90`: C that
    runs when it compiles for that."""
    source = Path(__file__).with_name("fake_nvrtc.c")
    return cc.shared_object(
        [(source, [f'-DRELEASE="{release}"', f'-DPTX="{ptx}"', f"-DSM_90={sm_90}"])]
    )


def real_nvrtc() -> Nvrtc:
    """The one here; skips without one."""
    try:
        return find_nvrtc()
    except TargetError as error:
        pytest.skip(str(error))
