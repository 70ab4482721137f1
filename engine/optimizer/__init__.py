"""Computes updates of AdamW and Muon and logs what they overwrite, so that a torn update can be undone."""
