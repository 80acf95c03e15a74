// Charts of the report: alternatives (step over memory), losses and seconds of a run. Also what the other
// scripts share, in `page`: the data of the page, formats of numbers, the tip, and drawing again after changes.
"use strict";
const page = (() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const tip = document.querySelector(".tip");
  const redraws = [];

  const formatSeconds = (s) => {
    for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
      if (Math.abs(s) >= size) return `${Number((s / size).toPrecision(4))} ${unit}`;
    return s === 0 ? "0" : `${Number((s / 1e-9).toPrecision(4))} ns`;
  };
  const formatBytes = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(bytes, 1)) / 10));
    return `${Number((bytes / 1024 ** power).toPrecision(3))} ${units[power]}`;
  };
  const formatNumber = (value) => `${Number(value.toPrecision(5))}`;

  const showTip = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 6))}px`;
    tip.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
  };
  const hideTip = () => { tip.hidden = true; };

  // Calls `draw` now, and again when the width of `element` or the colour scheme changes.
  const drawWhenever = (element, draw) => {
    let width = 0;
    const observer = new ResizeObserver(() => {
      if (Math.abs(element.clientWidth - width) > 1) { width = element.clientWidth; draw(); }
    });
    redraws.push(draw);
    observer.observe(element);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((draw) => draw()));

  // An SVG element of a chart, named for readers, with scales and axes inside of margins.
  const makeFrame = (box, label, { x, y, xFormat, yFormat, xTitle, yTitle, yTicks = y.ticks(5) }) => {
    const width = Math.max(280, box.clientWidth), height = box.classList.contains("tall") ? 352 : 224;
    const margin = { top: 22, right: 16, bottom: 40, left: 64 };
    box.querySelector("svg")?.remove();
    const svg = libraries.select(box).append("svg").attr("viewBox", `0 0 ${width} ${height}`)
      .attr("height", height).attr("role", "group").attr("aria-label", label);
    const across = x.copy().range([margin.left, width - margin.right]);
    const up = y.copy().range([height - margin.bottom, margin.top]);
    const rules = svg.append("g").attr("class", "grid").attr("aria-hidden", "true");
    rules.selectAll("line").data(yTicks).join("line").attr("x1", margin.left).attr("x2", width - margin.right)
      .attr("y1", up).attr("y2", up);
    const xTicks = Math.max(2, Math.floor(width / 110));
    svg.append("g").attr("aria-hidden", "true").attr("transform", `translate(0,${height - margin.bottom})`)
      .call(libraries.axisBottom(across).ticks(xTicks).tickFormat(xFormat).tickSizeOuter(0));
    svg.append("g").attr("aria-hidden", "true").attr("transform", `translate(${margin.left},0)`)
      .call(libraries.axisLeft(up).tickValues(yTicks).tickFormat(yFormat)).call((g) => g.select(".domain").remove());
    svg.append("text").attr("x", width - margin.right).attr("y", height - 5).attr("text-anchor", "end").text(xTitle);
    svg.append("text").attr("x", 4).attr("y", 12).text(yTitle);
    return { svg, across, up, width, height, margin };
  };

  // Arrow keys walk through `items`, which are in order; `show(item, i)` shows one and returns its text.
  const walkByKeys = (svg, items, readout, show) => {
    let at = -1;
    svg.attr("tabindex", 0).on("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const end = { Home: 0, End: items().length - 1 }[event.key];
      if (step === undefined && end === undefined) return;
      event.preventDefault();
      const count = items().length;
      at = end ?? Math.max(0, Math.min(count - 1, at + step));
      readout.textContent = show(items()[at], at);
    });
  };

  const addReadout = (box, text) => {
    let readout = box.querySelector(".readout");
    if (!readout) {
      readout = document.createElement("p");
      readout.className = "readout";
      readout.setAttribute("aria-live", "polite");
      readout.textContent = text;
      box.append(readout);
    }
    return readout;
  };

  // -- alternatives

  const drawAlternatives = (box, chart) => {
    const hidden = new Set();
    const chips = document.createElement("div");
    chips.className = "chips";
    chips.setAttribute("role", "group");
    chips.setAttribute("aria-label", "Sections shown");
    for (const section of chart.sections) {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.className = section.colour;
      chip.textContent = section.name;
      chip.setAttribute("aria-pressed", "true");
      chip.addEventListener("click", () => {
        const shown = hidden.delete(section.name) || !hidden.add(section.name);
        chip.setAttribute("aria-pressed", `${shown}`);
        draw();
      });
      chips.append(chip);
    }
    box.append(chips);
    const hint = "Filled points fit the memory, dashed ones do not; diamonds are the plan. Arrow keys walk through the points.";
    const readout = addReadout(box, hint);

    const describe = (d) => d.chosen
      ? `the plan: ${d.section} holds ${formatBytes(d.memory)}, step ${formatSeconds(d.step)}`
      : `${d.section}.${d.choice}: step ${formatSeconds(d.step)} (${d.step >= chart.step ? "+" : "−"}${Math.abs(100 * (d.step / chart.step - 1)).toFixed(1)}%), ` +
        `${formatBytes(d.memory)} on its fullest rank${d.fits ? "" : ", does not fit"}\n${d.layout}`;
    const points = () => chart.sections.filter((s) => !hidden.has(s.name)).flatMap((s) => [
      { section: s.name, colour: s.colour, memory: s.memory, step: chart.step, chosen: true, fits: true },
      ...s.points.map((p) => ({ ...p, section: s.name, colour: s.colour })),
    ]).sort((a, b) => a.step - b.step || a.memory - b.memory);

    const draw = () => {
      const shown = points();
      const usable = Math.min(...chart.sections.map((s) => s.usable));
      const memories = shown.map((d) => d.memory), steps = shown.map((d) => d.step);
      const most = libraries.max([...memories, 0]) || 1, longest = libraries.max([...steps, chart.step]) || 1;
      const isLimitNear = usable < 4 * most && usable > most / 8;
      const shortest = Math.min(chart.step, ...steps), spread = longest / shortest;
      const widest = Math.max(most, isLimitNear ? usable : 0) * 1.05;
      const unit = 1024 ** Math.min(4, Math.floor(Math.log2(Math.max(widest, 1)) / 10));
      const x = libraries.scaleLinear([0, widest / unit], [0, 1]);
      const low = spread > 2 ? 0 : shortest - (longest - shortest) * 0.15 - shortest * 0.01;
      const isWide = spread > 6;
      const y = isWide ? libraries.scaleLog([shortest * 0.85, longest * 1.15], [0, 1])
        : libraries.scaleLinear([low, longest + (longest - low) * 0.06], [0, 1]);
      const decades = Array.from({ length: 24 }, (_, i) => 10 ** (i - 12));
      const yTicks = isWide ? decades.flatMap((d) => [d, 2 * d, 5 * d]).filter((v) => v >= y.domain()[0] && v <= y.domain()[1]) : y.ticks(5);
      box.querySelector("svg")?.remove();
      const frame = makeFrame(box, "Step over memory of the alternatives", {
        x, y, yTicks, xFormat: (v) => formatBytes(v * unit), yFormat: formatSeconds,
        xTitle: "memory of the section's fullest rank", yTitle: `step, in closed form${isWide ? ", logarithmic" : ""}`,
      });
      const { svg, across, up, margin, height, width } = frame;
      box.insertBefore(svg.node(), readout);
      svg.append("line").attr("class", "reference").attr("x1", margin.left).attr("x2", width - margin.right)
        .attr("y1", up(chart.step)).attr("y2", up(chart.step));
      if (isLimitNear) {
        svg.append("line").attr("class", "limit-line").attr("x1", across(usable / unit)).attr("x2", across(usable / unit))
          .attr("y1", margin.top).attr("y2", height - margin.bottom);
        const left = across(usable / unit) > width - 130;
        svg.append("text").attr("x", across(usable / unit) + (left ? -6 : 6)).attr("y", margin.top + 10)
          .attr("text-anchor", left ? "end" : "start").text("memory for tensors");
      }
      const marks = svg.append("g").selectAll("path").data([...shown].sort((a, b) => (a.chosen ?? 0) - (b.chosen ?? 0))).join("path")
        .attr("class", (d) => `${d.colour} ${d.chosen ? "chosen" : d.fits ? "point" : "point full"}`)
        .attr("d", (d) => d.chosen ? "M0,-9L9,0L0,9L-9,0Z" : "M-5.5,0a5.5,5.5 0 1,0 11,0a5.5,5.5 0 1,0 -11,0")
        .attr("transform", (d) => `translate(${across(d.memory / unit)},${up(d.step)})`)
        .attr("role", "img").attr("aria-label", describe)
        .on("pointerenter pointermove", (event, d) => showTip(describe(d), event.clientX, event.clientY))
        .on("pointerleave", hideTip);
      walkByKeys(svg, points, readout, (d) => {
        marks.classed("active", (m) => m.section === d.section && m.choice === d.choice && m.chosen === d.chosen);
        return describe(d);
      });
    };
    drawWhenever(box, draw);
  };

  // -- curves of a run

  const drawCurve = (box, name, run) => {
    const isLoss = name === "losses";
    const curves = [{ name: isLoss ? "loss" : "step", colour: "s0", points: run[name] }];
    if (isLoss)
      Object.entries(run.evaluations).forEach(([set, points], i) =>
        curves.push({ name: set === "eval" ? "evaluation" : `evaluation of ${set}`, colour: `s${1 + (i % 7)}`, points }));
    const format = isLoss ? formatNumber : formatSeconds;
    const readout = addReadout(box, "Point at the curve, or use the arrow keys.");
    const draw = () => {
      const all = curves.flatMap((c) => c.points);
      const steps = libraries.extent(all, (p) => p[0]);
      const values = [...all.flatMap((p) => [p[2], p[3]]), ...(!isLoss && run.predicted_s ? [run.predicted_s] : [])];
      let [low, high] = libraries.extent(values);
      if (!isLoss) low = 0;
      if (low === high) high = low + (Math.abs(low) || 1);
      const x = libraries.scaleLinear([steps[0], Math.max(steps[1], steps[0] + 1)], [0, 1]);
      const y = libraries.scaleLinear([low, high], [0, 1]).nice();
      const { svg, across, up, margin, width, height } = makeFrame(box, isLoss ? "Loss by step" : "Seconds of a step", {
        x, y, xFormat: (v) => Number.isInteger(v) ? `${v}` : "", yFormat: format, xTitle: "step", yTitle: "",
      });
      box.insertBefore(svg.node(), readout);
      if (!isLoss && run.predicted_s) {
        const at = up(run.predicted_s);
        svg.append("line").attr("class", "reference").attr("x1", margin.left).attr("x2", width - margin.right).attr("y1", at).attr("y2", at);
        svg.append("text").attr("x", width - margin.right).attr("y", at - 6).attr("text-anchor", "end").attr("class", "on-curve").text(`predicted ${format(run.predicted_s)}`);
      }
      for (const curve of curves) {
        const group = svg.append("g").attr("class", curve.colour).attr("aria-hidden", "true");
        const bounds = [...curve.points.map((p) => [p[0], p[3]]), ...curve.points.map((p) => [p[0], p[2]]).reverse()];
        group.append("path").attr("class", "spread").attr("d", `${libraries.line((p) => across(p[0]), (p) => up(p[1]))(bounds)}Z`);
        group.append("path").attr("class", "curve").attr("d", libraries.line((p) => across(p[0]), (p) => up(p[1]))(curve.points));
        if (curve.points.length <= 40)
          group.selectAll("circle").data(curve.points).join("circle").attr("class", "point").attr("r", 3)
            .attr("cx", (p) => across(p[0])).attr("cy", (p) => up(p[1]));
      }
      const cursor = svg.append("line").attr("class", "cursor").attr("y1", margin.top).attr("y2", height - margin.bottom).attr("visibility", "hidden");
      const nearest = libraries.bisector((p) => p[0]).center;
      const show = (point) => {
        cursor.attr("visibility", "visible").attr("x1", across(point[0])).attr("x2", across(point[0]));
        const texts = curves.filter((c) => c.points.length).map((c) => {
          const p = c.points[nearest(c.points, point[0])];
          return c.name === curves[0].name ? `${c.name} ${format(p[1])}` : `${c.name} ${format(p[1])} (step ${p[0]})`;
        });
        return `step ${point[0]}: ${texts.join(", ")}`;
      };
      svg.on("pointermove", (event) => {
        const step = across.invert(libraries.pointer(event, svg.node())[0]);
        readout.textContent = show(curves[0].points[nearest(curves[0].points, step)]);
      });
      walkByKeys(svg, () => curves[0].points, readout, show);
    };
    drawWhenever(box, draw);
  };

  for (const box of document.querySelectorAll("[data-chart]")) {
    const name = box.dataset.chart;
    if (name === "alternatives") { if (data.alternatives) drawAlternatives(box, data.alternatives); else box.hidden = true; }
    else if (data.run?.[name]?.length) drawCurve(box, name, data.run);
    else box.hidden = true;
  }
  return { data, formatSeconds, showTip, hideTip, drawWhenever };
})();
