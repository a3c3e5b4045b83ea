"""Decoders. Each shows the stages that TST touches: embed, body, head."""
