"""The equation language of the family tables, and the exact index algebra under it. Knows no files.

    rule = equation("linear_fc1.weight : ((1 + 1) f) h = <gate|up>_proj.weight : f h")
    rule.pieces({"f": 4, "h": 2})        # fc1 -> gate, up; rule.swap() is the way back
    compose(megatron_to_hub, hub_to_paddle)

`expression` reads what axes and conditions say, `pattern` how axes make up dims, `equation` whole rules; `piece` is
what they come to, `compose` joins pieces end to end and proves that they tile, `element_map` changes values.
"""
