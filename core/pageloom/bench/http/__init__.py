"""``pageloom bench serve``: load over HTTP on any server of the OpenAI API."""
