"""Several tokens per step: what to draft, when drafting pays, which drafts to keep."""
