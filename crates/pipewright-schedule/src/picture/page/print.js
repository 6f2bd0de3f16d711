
// Prints the page in the light theme, whatever the reader's theme is, with a picture that is sharp on paper.

function setPrinting(isNow) {
  isPrinting = isNow;
  readTheme();
  overviewImage = null;
  hideTip();
  draw();
}

addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));
