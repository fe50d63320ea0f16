// The search takes a hyphen before a word for "without it"; who types --dequantize looks for the option.
document.addEventListener("input", event => {
  const box = event.target
  if (box.matches(".md-search__input") && /(^|\s)-/.test(box.value))
    box.value = box.value.replace(/(^|\s)-+/g, "$1")
}, true)
