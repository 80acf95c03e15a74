// RUN: secc opt %s -p 'normalize-loss,dce' | filecheck %s

// A plan has one constant. Where patterns add different ones, each sample brings its share of a term.

sec.graph "cases" optional ["image"] {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "net" class "Net" params 10 trainable 10
  // CHECK: sec.case "text"
  sec.case "text" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %y = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%y) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    sec.return (%l)
    // CHECK: sec.term "loss" (%l)
    // CHECK: [[B:%[0-9]+]] = sec.glue "aten.full.default" args "[], B
    // CHECK: sec.term "constant" ([[B]], {{%[0-9]+}})
    // CHECK-NEXT: sec.return constant "0.0"
  }
  // CHECK: sec.case "image"
  sec.case "image" when ["image"] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %y = sec.call "net" (%x) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %l2 = sec.glue "aten.sum.default" (%y) args "$0" at "loss.py:3" : !sec.tensor<[], f32, grad>
    %m = sec.glue "aten.add.Tensor" (%l2) args "$0, 1.5" at "loss.py:4" : !sec.tensor<[], f32, grad>
    sec.return (%m)
    // CHECK: sec.term "loss" (%l2)
    // CHECK: [[SHARE:%[0-9]+]] = sec.glue "aten.mul.Tensor" ({{%[0-9]+}}) args "$0, 1.5"
    // CHECK: sec.term "constant" ({{%[0-9]+}}, [[SHARE]])
    // CHECK-NEXT: sec.return constant "0.0"
  }
}
