# SPDX-License-Identifier: Apache-2.0
"""Makes `import quantfuse` work in the environment whose Python runs this: checkout and build/'s library."""

import sysconfig
from pathlib import Path

folder = Path(__file__).resolve().parent
link = Path(sysconfig.get_path("purelib")) / "quantfuse_checkout.pth"
link.write_text(f"{folder}\n")
print(f"{link} -> {folder}")
