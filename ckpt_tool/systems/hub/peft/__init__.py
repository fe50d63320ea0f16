"""Format `peft`: adapter folders of Hugging Face's PEFT."""
