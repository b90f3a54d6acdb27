"""Families of models as OpenVINO GenAI has them, one file each, whose `FAMILY` is a
`vlmcompress.export.openvino.OpenvinoFamily`."""
