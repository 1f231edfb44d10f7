"""A recorded run for programs and language models: one JSON document or Markdown text of at most 64 kB."""
