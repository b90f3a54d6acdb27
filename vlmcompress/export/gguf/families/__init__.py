"""Families of models as llama.cpp has them, one file each, whose `FAMILY` is a `vlmcompress.export.gguf.GgufFamily`."""
