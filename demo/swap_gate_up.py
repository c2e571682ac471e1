"""Copy a Hugging Face checkpoint with one planted fault: gate_proj and up_proj of one layer exchanged.

Both have the same shape, so nothing but their values can show it. The names are exchanged in the file's header.
"""

import json
import shutil
import struct
import sys
from pathlib import Path

source, target, layer = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
shutil.copytree(source, target, dirs_exist_ok=True)
data = (source / "model.safetensors").read_bytes()
length = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8 : 8 + length])
gate, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up"))
header[gate], header[up] = header[up], header[gate]
text = json.dumps(header, separators=(",", ":")).encode()
text += b" " * (-len(text) % 8)
(target / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
