"""Parts of `scripts/soak/soak.py`: what is sent (`traffic`, `malformed`), how (`client`), what is right (`verdict`), memory
(`memory`)."""
