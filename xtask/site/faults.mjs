// What is wrong with the page that is shown. It runs in the page, so it uses nothing from outside.

export async function faults() {
  const found = [];
  const brief = (element) => `${element.tagName.toLowerCase()} "${element.textContent.trim().slice(0, 60)}"`;
  const article = document.querySelector("article") ?? document.body;
  const width = document.documentElement.clientWidth;

  if (document.documentElement.scrollWidth > width) {
    found.push(`the page is ${document.documentElement.scrollWidth} wide in a window of ${width}`);
  }

  // What is wider than the window has to be in an element that scrolls.
  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  for (const element of article.querySelectorAll("table, img, pre, p, li, h1, h2, h3, h4")) {
    const box = element.getBoundingClientRect();
    if (!box.width || (box.left >= 0 && box.right <= width + 1)) continue;
    let parent = element;
    while (parent && !scrolls(parent)) parent = parent.parentElement;
    if (!parent || parent === document.documentElement) found.push(`cut off: ${brief(element)}`);
  }

  for (const image of article.querySelectorAll("img")) {
    image.loading = "eager";
    await image.decode().catch(() => found.push(`not there: ${image.src}`));
    if (!image.alt) found.push(`without a text: ${image.src}`);
  }

  const luminance = (colour) => {
    const [red, green, blue] = colour.map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const painted = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  // The colours of an element and of all in which it stands, from the outside in.
  const known = new Map([[null, "white"]]);
  const grounds = (element) => {
    if (!known.has(element)) {
      const own = getComputedStyle(element).backgroundColor;
      const outside = grounds(element.parentElement);
      known.set(element, own === "rgba(0, 0, 0, 0)" ? outside : `${outside};${own}`);
    }
    return known.get(element);
  };
  const contrasts = new Map();
  const contrast = (element) => {
    const ground = grounds(element);
    const colours = `${ground};${getComputedStyle(element).color}`;
    if (!contrasts.has(colours)) {
      const [one, other] = [ground, colours].map((some) => luminance(painted(some.split(";")))).sort((a, b) => b - a);
      contrasts.set(colours, (one + 0.05) / (other + 0.05));
    }
    return contrasts.get(colours);
  };

  const texts = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent;
    const element = texts.currentNode.parentElement;
    if (!text.trim() || element.closest("script, style, svg, .md-clipboard, .headerlink, [hidden]")) continue;
    const raw = element.closest("code, pre") ? null : text.match(/\]\(|\*\*|`|<!--|-->|^:::|\|--|~~~~/);
    if (raw) found.push(`raw markup ${raw[0]}: ${brief(element)}`);
    // WCAG asks for 4.5, and the theme's colours of code have 4.1.
    if (contrast(element) < 4) found.push(`faint, ${contrast(element).toFixed(1)}: ${brief(element)}`);
  }
  return found;
}
