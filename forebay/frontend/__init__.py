"""What users talk to: the OpenAI-compatible server (`server`, `app`) and the offline `LLM` (`llm`), over one `engine`."""
