// The search takes a hyphen before a word for "without it"; who types --dequantize looks for the option. And it looks at
// its box when a key is released: text that is pasted by mouse, or that an input method commits, releases none.
document.addEventListener("input", event => {
  const box = event.target
  if (!box.matches(".md-search__input"))
    return
  if (/(^|\s)-/.test(box.value))
    box.value = box.value.replace(/(^|\s)-+/g, "$1")
  box.dispatchEvent(new Event("keyup"))
}, true)
