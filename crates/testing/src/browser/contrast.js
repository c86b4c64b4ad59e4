(() => {
  const parts = (colour) => { const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number); return { r, g, b, a }; };
  const luminance = ({ r, g, b }) => {
    const [x, y, z] = [r, g, b].map((value) => { const part = value / 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const painted = (colour) => colour !== "none" && parts(colour).a > 0;
  const ground = (element) => {
    if (element instanceof SVGElement) {
      const shape = element.parentElement.querySelector(":scope > .box");
      if (shape) return getComputedStyle(shape).fill;
      return ground(element.closest("svg").parentElement);
    }
    const own = getComputedStyle(element).backgroundColor;
    return painted(own) ? own : element.parentElement ? ground(element.parentElement) : "rgb(255, 255, 255)";
  };
  const faint = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!own || !element.checkVisibility() || ["SCRIPT", "STYLE", "NOSCRIPT", "title", "desc"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const [ink, paper] = [element instanceof SVGElement ? style.fill : style.color, ground(element)].map((colour) => luminance(parts(colour)));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (contrast < 4.5) faint.push(`${element.tagName} ${element.getAttribute("class")} "${element.textContent.slice(0, 40)}" ${contrast.toFixed(2)}`);
  }
  return faint.slice(0, 10);
})()
