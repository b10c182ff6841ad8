/* A table that is wider than the page says that it scrolls: phones show no scroll bar. */
const markWideTables = () => {
  for (const box of document.querySelectorAll(".table-wrapper")) {
    const isCut = box.scrollWidth > box.clientWidth;
    box.classList.toggle("is-cut", isCut);
    if (isCut) box.tabIndex = 0; /* so that arrow keys scroll it */
  }
};
markWideTables();
addEventListener("resize", markWideTables);

/* The search shows pages for users first: what helps in trouble, then guides, and last
   lists, what was decided, each signature, and pages in another language. */
if (typeof Scorer !== "undefined") {
  const lists = /(architecture|errors|examples|glossary|measuring|numerics|reports)$/;
  Scorer.score = ([page, , anchor, , score]) => {
    const isGuide = /^docs\/[a-z]+$/.test(page) && !lists.test(page);
    const isTrouble = page === "docs/troubleshooting";
    return score + 20 * isGuide + 8 * isTrouble + 10 * (isGuide && anchor !== "");
  };
}
