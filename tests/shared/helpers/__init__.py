"""What tests share: tables, tiny models, counterparts, and processes."""
