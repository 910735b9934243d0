"""Operations of the decode round, one folder each: `api.py` chooses, `reference.py` defines."""
