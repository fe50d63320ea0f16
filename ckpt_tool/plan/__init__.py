"""Pure: a catalog's tensors and a target become strided copies between byte ranges. No formats, no storage, no IO."""
